import { writeFile } from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const events = await client.images.generate({
  prompt: "a large red circle in the center on a white background",
  stream: true,
  partial_images: 3,
});
for await (const event of events) {
  const isPreview = event.type === "image_generation.partial_image";
  const name = isPreview ? `preview-${event.partial_image_index}.png` : "final.png";
  await writeFile(name, Buffer.from(event.b64_json, "base64"));
  console.log(name);
}
