from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

# A text, as it is written.
question = "a blue star"
for chunk in client.chat.completions.create(
    model="demo", messages=[{"role": "user", "content": question}], temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)

# A text with its picture; the picture's parameters are those of /v1/images/generations.
answer = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": question}],
    extra_body={"modalities": ["text", "image"], "true_cfg_scale": 3.0, "seed": 1},
)
message = answer.choices[0].message
url = message.model_dump()["images"][0]["image_url"]["url"]  # data:image/png;base64,…
print(f"\n{message.content}: {len(url)} characters")

# A picture as input.
seen = client.chat.completions.create(
    model="demo",
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "Describe the picture."},
            ],
        }
    ],
    temperature=0,
)
print(seen.choices[0].message.content)
