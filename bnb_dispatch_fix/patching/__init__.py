"""The matrix and installed functions in; verdicts, wrappers over names and who else is there out.

Called by activation.py; doctor/ and planning/ read the matrix and look through the wrappers.
"""
