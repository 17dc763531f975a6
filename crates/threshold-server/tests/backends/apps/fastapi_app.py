"""FastAPI on uvicorn, with the HTTP parser that the first argument names; with `below` as the second, everything below
/api/login is the login, too. Prints its port, counts the calls of its login, and reports the count on /health."""

import socket
import sys

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
calls = 0


@app.post("/api/login")
async def login():
    global calls
    calls += 1
    return PlainTextResponse("login", headers={"X-Login": "ran"})


if "below" in sys.argv:
    app.post("/api/login/{rest:path}")(login)


@app.api_route("/health", methods=["GET", "POST"])
async def health():
    return PlainTextResponse(str(calls))


listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, http=sys.argv[1], access_log=False, log_level="critical")
uvicorn.Server(config).run(sockets=[listener])
