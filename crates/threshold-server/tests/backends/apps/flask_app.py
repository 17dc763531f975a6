"""Flask on gunicorn. Prints its port, counts the calls of its login, and reports the count on /health."""

import threading

from flask import Flask
from gunicorn.app.base import BaseApplication

app = Flask(__name__, static_folder=None)
lock = threading.Lock()
calls = 0


@app.post("/api/login")
def login():
    global calls
    with lock:
        calls += 1
    return "login", 200, {"X-Login": "ran"}


@app.route("/health", methods=["GET", "POST"])
def health():
    return str(calls)


class Server(BaseApplication):
    def load_config(self):
        # One worker, because the count is the process's own.
        options = {"bind": "127.0.0.1:0", "workers": 1, "worker_class": "gthread", "threads": 8, "loglevel": "critical"}
        for name, value in options.items():
            self.cfg.set(name, value)
        self.cfg.set("when_ready", lambda arbiter: print(arbiter.LISTENERS[0].sock.getsockname()[1], flush=True))

    def load(self):
        return app


Server().run()
