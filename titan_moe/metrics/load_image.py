"""Draw the loads of experts as an image with a scale: a row for each layer, a column for each expert.

L layers · E experts · H height · W width
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WHITE_LOAD = 4.0
"""Load of a white cell. Black is an idle expert, a quarter of white is balanced."""
CELL_PIXELS = 8
LEFT, TOP, RIGHT, BOTTOM = 36, 20, 84, 20
"""Margins around the cells, in pixels: numbers of layers, a title, the bar of the scale, numbers of experts."""
LEAST_WIDTH, LEAST_HEIGHT = 240, 88
"""Least size of an image, for its words."""
PAPER, INK = 255, 0
TICK_PIXELS = {"across": 40, "down": 16}
"""Least distance between two numbers of an axis."""


def draw_loads(loads_LE: Tensor, layers: Sequence[str]) -> np.ndarray:
    """Draw loads over the mean of their layer; `layers` are the numbers that name the rows.

    Shapes: loads [L, E] on the host → uint8 [H, W], gray.
    """
    gray_LE = (loads_LE.clamp(max=WHITE_LOAD) * (255 / WHITE_LOAD)).round().to(torch.uint8)
    cells_HW = gray_LE.repeat_interleave(CELL_PIXELS, 0).repeat_interleave(CELL_PIXELS, 1).numpy()
    height, width = cells_HW.shape
    size = max(LEFT + width + RIGHT, LEAST_WIDTH), max(TOP + height + BOTTOM, LEAST_HEIGHT)
    image = Image.new("L", size, PAPER)
    image.paste(Image.fromarray(cells_HW), (LEFT, TOP))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()

    def write(x: float, y: float, words: str, anchor: str) -> None:
        """`anchor` is the place of (x, y) at the words: l, m, r for left, middle, right; a, m for top, middle."""
        left, top, right, bottom = draw.textbbox((0, 0), words, font=font)
        x -= {"l": left, "m": (left + right) / 2, "r": right}[anchor[0]]
        y -= {"a": top, "m": (top + bottom) / 2}[anchor[1]]
        draw.text((round(x), round(y)), words, fill=INK, font=font)

    write(LEFT, 4, "load of experts (across) by layer (down)", "la")
    for row in _ticks(len(layers), TICK_PIXELS["down"]):
        write(LEFT - 4, TOP + (row + 0.5) * CELL_PIXELS, layers[row], "rm")
    for column in _ticks(loads_LE.shape[1], TICK_PIXELS["across"]):
        write(LEFT + (column + 0.5) * CELL_PIXELS, TOP + height + 4, str(column), "ma")
    _draw_scale(image, write, LEFT + width + 12)
    return np.asarray(image)


def _draw_scale(image: Image.Image, write: Callable[[float, float, str, str], None], x: int) -> None:
    """Draw a bar from black to white with the loads that its colours mean, as high as the image allows."""
    height = image.height - TOP - BOTTOM
    bar = np.linspace(255, 0, height, dtype=np.float64).round().astype(np.uint8)
    image.paste(Image.fromarray(np.repeat(bar[:, None], 2 * CELL_PIXELS, 1)), (x, TOP))
    ImageDraw.Draw(image).rectangle((x - 1, TOP - 1, x + 2 * CELL_PIXELS, TOP + height), outline=INK)
    for load, words in ((0.0, "idle"), (1.0, "1: even"), (WHITE_LOAD, f"{WHITE_LOAD:g}, more")):
        write(x + 2 * CELL_PIXELS + 4, TOP + (1 - load / WHITE_LOAD) * (height - 1), words, "lm")


def _ticks(number: int, pixels: int) -> range:
    """Which cells of a row or a column have a number beside them."""
    return range(0, number, -(-pixels // CELL_PIXELS))
