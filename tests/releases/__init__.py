"""A checkpoint and a compiled step of each release, which later ones read or refuse by name."""
