"""The commands of ``zerograph``, one module each; ``zerograph/__main__.py`` gathers them."""
