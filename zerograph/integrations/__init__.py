"""The front doors of other training frameworks. Each module needs its framework installed; nothing else imports it."""
