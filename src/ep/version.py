"""The version; the package's metadata takes it from here, so a bare source tree knows it too."""

__version__ = "0.1.0"
