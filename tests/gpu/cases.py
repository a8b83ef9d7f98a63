"""What the scripts of this folder share: cases that each print one line, the same natively and remotely."""

import hashlib
import sys

CASES = []


def case(function):
    """Makes a function a case: what it returns is printed behind its name."""
    CASES.append(function)
    return function


def digest(*arrays):
    """A short hash of the bytes of arrays in the host's memory."""
    import numpy as np

    h = hashlib.sha256()
    for a in arrays:
        h.update(np.ascontiguousarray(a).tobytes())
    return h.hexdigest()[:16]


def run():
    """Runs all cases, or those that the command line names. The exit status is the number of those that failed."""
    failed = 0
    for function in CASES:
        name = function.__name__
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            print(f"{name}: {function()}", flush=True)
        except Exception as e:
            failed += 1
            print(f"{name} fails: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}", flush=True)
    sys.exit(failed)
