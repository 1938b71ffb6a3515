"""Fixed points x = f(x), their derivatives, their stability, and layers iterated to them."""
