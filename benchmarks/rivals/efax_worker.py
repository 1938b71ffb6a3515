"""efax at work in an interpreter of its own, for `families.py`: it needs a newer Python than exptilt does.

    python efax_worker.py PARAMETERS.npz THREADS

reads natural parameters by name, says on standard output which cases it has, and then answers standard input
line by line:

    run NAME          one call, compiled and waited for; answers "done"
    save NAME PATH    the call's result as a .npy file; answers "done"

A case that fails answers with the error instead. Nothing here imports exptilt.
"""

import os
import sys
from collections.abc import Callable
from typing import Any


def cases(parameters: Any) -> dict[str, Callable[[], Any]]:
    """Round trips, divergences and draws of what efax has, each one compiled function."""
    import efax
    import jax
    import jax.numpy as jnp

    def array(name: str) -> Any:
        return jnp.asarray(parameters[name])

    def members(which: str) -> dict[str, Any]:
        gamma = array(f"{which} Gamma")
        return {
            "Gaussian": efax.MultivariateNormalNP(
                array(f"{which} Gaussian"), array(f"{which} Gaussian matrix")
            ),
            "Gamma": efax.GammaNP(gamma[:, 0], gamma[:, 1]),
            "Beta": efax.BetaNP(array(f"{which} Beta")),
            "Dirichlet": efax.DirichletNP(array(f"{which} Dirichlet")),
            "Poisson": efax.PoissonNP(array(f"{which} Poisson")[:, 0]),
            "VonMisesFisher": efax.VonMisesFisherNP(array(f"{which} VonMisesFisher")),
        }

    made: dict[str, Callable[[], Any]] = {}
    first, second = members("first"), members("second")
    key = jax.random.key(0)
    for name, p in first.items():
        trip = jax.jit(lambda p: p.to_exp().to_nat())
        divergence = jax.jit(lambda p, q: p.kl_divergence(q))
        made[f"round trip: {name}"] = lambda p=p, trip=trip: trip(p)
        made[f"KL: {name}"] = lambda p=p, q=second[name], divergence=divergence: divergence(p, q)
        if hasattr(p, "sample"):
            draw = jax.jit(lambda p, key: p.sample(key))
            made[f"sampling: {name}"] = lambda p=p, draw=draw: draw(p, key)
    return made


def flat(result: Any) -> Any:
    """A result as one array (batch, numbers): a distribution's tensors side by side, matrices in full."""
    import jax
    import numpy as np

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
    return np.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], 1)


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    if hasattr(os, "sched_setaffinity"):  # jax takes as many threads as it has cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax

    jax.config.update("jax_enable_x64", True)
    from importlib import metadata

    import numpy as np

    known = cases(np.load(path))
    print("efax", metadata.version("efax"), "jax", metadata.version("jax"), sep="\t", flush=True)
    print(*known, sep="\t", flush=True)
    for line in sys.stdin:
        order, name, *where = line.rstrip("\n").split("\t")
        try:
            result = jax.block_until_ready(known[name]())
            if order == "save":
                np.save(where[0], flat(result))
            print("done", flush=True)
        except Exception as error:  # the other side decides what to make of it
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
