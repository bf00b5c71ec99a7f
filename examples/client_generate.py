import base64

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.images.generate(
    prompt="a large red circle in the center on a white background",
    size="256x256",
    n=2,
    extra_body={"seed": 1, "true_cfg_scale": 3.0},  # beyond OpenAI's
)
for i, image in enumerate(answer.data or ()):
    with open(f"circle-{i}.png", "wb") as file:
        file.write(base64.b64decode(image.b64_json or ""))
