"""The arithmetic of #47203, #47211, #4298 and #4083: what stands in for functions that lack them.

A call of an installed function in, what the fixed release would answer out. Called through
patching/, which decides where it may stand.
"""
