"""The command line: parse, ask the daemon over its socket, print.

    __main__ ─► argv (own options to the front) ─► app (typer) ─► one module a group of commands ─► client ─► socket
         └─► ending (errors become one sentence and an exit status)

Modules are imported by every command, so they import late whatever costs: rich, pydantic, tarfile.
"""
