"""The version, in a module without imports: the build reads it too."""

__version__ = "0.1.0"
