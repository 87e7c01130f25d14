"""Front doors for scripts and configurations of other systems, each thin over the ordinary interface."""
