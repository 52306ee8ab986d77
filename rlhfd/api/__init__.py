"""The daemon's HTTP API on a unix socket.

    serve_api (server.py) ── who asks? (peer.py) ──► create_app (app.py) ──► Service (service.py), which the daemon is

Errors are always {"error": one sentence, "exit_status": what a command ends with}.
"""

from rlhfd.api.app import create_app
from rlhfd.api.server import serve_api
from rlhfd.api.service import Service, SubmitBody

__all__ = ["Service", "SubmitBody", "create_app", "serve_api"]
