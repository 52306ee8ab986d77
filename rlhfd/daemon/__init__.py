"""The daemon: one process, one loop; it owns the database, the device leases and every decision.

main.py        composition root         supervisor.py  queue, leases, one run per job
statedir.py    directories, lock        submit.py      validate, inspect, one row
service.py     answers for the API      replica.py     a learner for audit.py and export.py
"""

from rlhfd.daemon.main import main

__all__ = ["main"]
