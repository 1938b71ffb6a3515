"""Looking at real transformers: watch attention, study heads and layers, monitor training."""

__all__: list[str] = []
