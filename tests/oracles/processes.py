"""Python code in a process of its own, where other libraries or settings are loaded first."""

import os
import subprocess
import sys


def child(code, *arguments, **environment):
    """What the code prints, with all folders that this process imports from."""
    kept = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
