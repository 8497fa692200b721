"""Integer dithering and layers of any density, as the papers write them, to hold the package to."""


def dither_dequantize(symbols, dither, step):
    """(M - U) w in float64. The error is uniform on (-w/2, w/2]."""
    return (symbols.double() - dither) * step
