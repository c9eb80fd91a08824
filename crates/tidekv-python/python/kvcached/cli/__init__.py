"""kvcached's command-line modules. The commands are the native ones; these are their Python names."""
