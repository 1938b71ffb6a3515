"""particles, blackjax and numpyro on the target of benchmarks/sampling.py, in an interpreter of their own.

`python smc_worker.py TARGET.npz COUNT` prints the names of what it can run, then for each name that it
reads one line of JSON: seconds, mean and log_evidence (None where there is none). Compiling comes first
and is not counted.
"""

import json
import sys
import time

import numpy as np


def particles_runs(J, log_p, count):
    import particles
    from particles import distributions, smc_samplers

    class Target(smc_samplers.StaticModel):
        def loglik(self, theta, t=None):
            x = np.stack([theta["a"], theta["b"]], 1)
            return np.logaddexp.reduce(x @ J.T + log_p, axis=1)

    prior = distributions.StructDist({"a": distributions.Normal(), "b": distributions.Normal()})
    model = Target(data=np.zeros(1), prior=prior)

    def smc():
        kernel = smc_samplers.AdaptiveTempering(model, len_chain=6, ESSrmin=0.5, wastefree=False)
        run = particles.SMC(fk=kernel, N=count, verbose=False)
        run.run()
        theta = run.X.theta
        return [float(np.sum(run.W * theta[name])) for name in ("a", "b")], float(run.logLt)

    return {"particles: SMC": smc}


def blackjax_runs(J, log_p, count):
    import blackjax
    import jax
    import jax.numpy as jnp
    from blackjax.smc import extend_params, resampling

    matrix, offset = jnp.asarray(J), jnp.asarray(log_p)

    def log_prior(x):
        return -0.5 * jnp.sum(x**2)

    def log_likelihood(x):
        return jax.scipy.special.logsumexp(matrix @ x + offset)

    def step(key, state, logdensity, sigma):
        def propose(key, x):
            return x + sigma * jax.random.normal(key, x.shape)

        return blackjax.rmh.build_kernel()(key, state, logdensity, propose)

    smc = blackjax.adaptive_tempered_smc(
        log_prior,
        log_likelihood,
        step,
        blackjax.rmh.init,
        extend_params({"sigma": jnp.array(1.2)}),
        resampling.systematic,
        0.5,
        num_mcmc_steps=5,
    )

    @jax.jit
    def tempered(key):
        first, key = jax.random.split(key)

        def going(carry):
            state = carry[0]
            return (state.tempering_param if hasattr(state, "tempering_param") else state.lmbda) < 1

        def advance(carry):
            state, key, total = carry
            key, now = jax.random.split(key)
            state, info = smc.step(now, state)
            return state, key, total + info.log_likelihood_increment

        begin = (smc.init(jax.random.normal(first, (count, 2))), key, 0.0)
        state, _, total = jax.lax.while_loop(going, advance, begin)
        return (state.weights[:, None] * state.particles).sum(0), total

    nuts = blackjax.nuts(lambda x: log_prior(x) + log_likelihood(x), 0.7, jnp.ones(2))
    chains, sweeps, discard = count // 10, 10, 10

    @jax.jit
    def sampled(key):
        first, key = jax.random.split(key)
        state = jax.vmap(nuts.init)(jax.random.normal(first, (chains, 2)))

        def advance(state, key):
            state, _ = jax.vmap(nuts.step)(jax.random.split(key, chains), state)
            return state, state.position.mean(0)

        return jax.lax.scan(advance, state, jax.random.split(key, discard + sweeps))[1][discard:].mean(0)

    seeds = iter(range(10**9))

    def run_smc():
        mean, total = tempered(jax.random.PRNGKey(next(seeds)))
        return np.asarray(mean).tolist(), float(total)

    def run_nuts():
        return np.asarray(sampled(jax.random.PRNGKey(next(seeds)))).tolist(), None

    return {"blackjax: SMC": run_smc, "blackjax: NUTS": run_nuts}


def numpyro_runs(J, log_p, count):
    import jax
    import jax.numpy as jnp
    from numpyro.infer import NUTS

    matrix, offset = jnp.asarray(J), jnp.asarray(log_p)

    def potential(x):
        return 0.5 * jnp.sum(x**2) - jax.scipy.special.logsumexp(matrix @ x + offset)

    # the same chains, draws, step size and metric as blackjax's: nothing is adapted
    kernel = NUTS(potential_fn=potential, step_size=0.7, adapt_step_size=False, adapt_mass_matrix=False)
    chains, sweeps, discard = count // 10, 10, 10
    blank = kernel.init(jax.random.split(jax.random.PRNGKey(0), chains), 0, jnp.zeros((chains, 2)), (), {})

    @jax.jit
    def sampled(key):
        first, key = jax.random.split(key)
        x = jax.random.normal(first, (chains, 2))
        energy, slope = jax.vmap(jax.value_and_grad(potential))(x)
        state = blank._replace(
            z=x, z_grad=slope, potential_energy=energy, rng_key=jax.random.split(key, chains)
        )

        def advance(state, _):
            state = kernel.sample(state, (), {})
            return state, state.z.mean(0)

        return jax.lax.scan(advance, state, None, length=discard + sweeps)[1][discard:].mean(0)

    seeds = iter(range(10**9))

    def run_nuts():
        return np.asarray(sampled(jax.random.PRNGKey(next(seeds)))).tolist(), None

    return {"numpyro: NUTS": run_nuts}


def main():
    target, count = np.load(sys.argv[1]), int(sys.argv[2])
    known = {}
    for make in (particles_runs, blackjax_runs, numpyro_runs):
        try:
            known |= make(target["J"], target["log_p"], count)
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    for run in known.values():
        run()
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        mean, evidence = known[line.strip()]()
        found = {"seconds": time.perf_counter() - begin, "mean": mean, "log_evidence": evidence}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
