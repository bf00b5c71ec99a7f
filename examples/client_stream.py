import base64

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
events = client.images.generate(
    prompt="a large red circle in the center on a white background", stream=True, partial_images=3
)
for event in events:
    if event.type == "image_generation.partial_image":
        name = f"preview-{event.partial_image_index}.png"
    else:
        name = "final.png"
    with open(name, "wb") as file:
        file.write(base64.b64decode(event.b64_json))
    print(name)
