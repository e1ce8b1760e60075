"""`pop-bench`: time to first token, time per token and memory of a bundle, beside other engines in the same run.

Every engine runs in a process of its own (`worker.py`), so that none brings its libraries or its threads into another's
figures, and nothing here needs more than the runtime does.
"""
