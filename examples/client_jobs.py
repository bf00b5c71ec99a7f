import time

import httpx

url = "http://127.0.0.1:8000/v1/images/jobs"
body = {
    "prompt": "a large red circle in the center on a white background",
    "response_format": "url",
}
job = httpx.post(url, json=body).raise_for_status().json()
while job["status"] in ("queued", "in_progress"):
    print(f"{job['status']}: {job['progress']} %, {job['estimated_seconds']} s to go")
    time.sleep(0.5)
    job = httpx.get(f"{url}/{job['id']}").raise_for_status().json()
print(job["result"]["data"][0]["url"])
