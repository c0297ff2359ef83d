"""The shim in programs that do not import it: `run`, and start-up files on explicit request.

Called by the command and by doctor/.
"""
