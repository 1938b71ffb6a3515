"""stub"""

__all__: list[str] = []
