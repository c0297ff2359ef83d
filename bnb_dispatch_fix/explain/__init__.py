"""A refusal, a wrong argument or an odd plan in; lines of text with numbers and recipes out.

Called by wrappers/ when something went wrong, and by planning/.
"""
