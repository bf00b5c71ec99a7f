import { writeFile } from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const answer = await client.images.generate({
  prompt: "a large red circle in the center on a white background",
  size: "256x256",
  seed: 1, // beyond OpenAI's
  true_cfg_scale: 3.0,
});
await writeFile("circle.png", Buffer.from(answer.data[0].b64_json, "base64"));
