"""Pure tensor functions, one idea a file; nothing here knows of clients or servers."""
