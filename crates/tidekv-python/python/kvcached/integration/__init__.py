"""What engines call: the same two modules of functions as kvcached's, and the frame for changing engines."""
