"""Pure tensor functions, one idea a file. Nothing here knows of clients or servers."""
