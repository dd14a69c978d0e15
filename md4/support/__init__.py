"""Tools for all of md4: checks of arguments, locks, files and caches, host memory, progress bars, display."""
