"""Django on waitress. Prints its port, counts the calls of its login, and reports the count on /health."""

import logging
import threading

import django
import waitress
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.http import require_POST

lock = threading.Lock()
calls = 0


@require_POST
def login(_request):
    global calls
    with lock:
        calls += 1
    return HttpResponse("login", headers={"X-Login": "ran"})


def health(_request):
    return HttpResponse(str(calls))


urlpatterns = [path("api/login", login), path("health", health)]

settings.configure(ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None, MIDDLEWARE=[], ROOT_URLCONF=__name__, SECRET_KEY="test")
# Each path that is not there would be a line.
logging.disable(logging.ERROR)
django.setup()
server = waitress.create_server(get_wsgi_application(), host="127.0.0.1", port=0, threads=8)
print(server.effective_port, flush=True)
server.run()
