"""What every part of md4 uses: checked arguments, locks, files and caches, host memory, progress bars, display."""
