curl --no-buffer http://127.0.0.1:8000/v1/images/generations -H 'Content-Type: application/json' \
  -d '{"prompt": "a large red circle in the center on a white background", "stream": true, "partial_images": 2}'
