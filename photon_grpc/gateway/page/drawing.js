// Canvases that are as sharp as the screen, and the colours of the legend.

/** Prepare a canvas for a drawing in CSS pixels; return {context, width, height}. */
export function cleared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Colours by the names of the legend's swatches, so that picture and legend cannot differ. */
export function legendColours() {
  const colours = {};
  for (const swatch of document.querySelectorAll(".swatch")) {
    colours[swatch.classList[1]] = getComputedStyle(swatch).backgroundColor;
  }
  const style = getComputedStyle(document.querySelector("canvas"));
  return { ...colours, ink: style.color, line: style.borderTopColor };
}

/** Draw values over time as a line that starts at zero; null breaks it. */
export function drawSpark(canvas, points, from_s, to_s, colour) {
  const { context, width, height } = cleared(canvas);
  const most = Math.max(...points.map(([, value]) => value ?? 0), 1e-9);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  let isDown = false;
  for (const [at_s, value] of points) {
    if (value !== null) {
      const x = ((at_s - from_s) / (to_s - from_s)) * width;
      const y = height - 2 - (value / most) * (height - 6);
      if (isDown) context.lineTo(x, y);
      else context.moveTo(x, y);
    }
    isDown = value !== null;
  }
  context.stroke();
}

/** Draw counts as squares in the order given, one square for one unit or for several. Return the units of a square. */
export function drawSquares(canvas, parts, total) {
  const { context, width, height } = cleared(canvas);
  const most = Math.floor((width * height) / 64); // of 8 × 8 pixels at least
  const unit = Math.max(1, Math.ceil(total / most));
  const count = Math.ceil(total / unit);
  const side = sideOf(count, width, height);
  const columns = Math.max(1, Math.floor(width / side));
  let drawn = 0;
  let counted = 0;
  for (const [units, colour] of parts) {
    counted += units;
    context.fillStyle = colour;
    for (const end = Math.round(counted / unit); drawn < end && drawn < count; drawn++) {
      context.fillRect((drawn % columns) * side, Math.floor(drawn / columns) * side, side - 1, side - 1);
    }
  }
  return unit;
}

/** The largest side with which `count` squares fit. */
function sideOf(count, width, height) {
  let side = Math.min(height, Math.sqrt((width * height) / Math.max(1, count)));
  while (side > 2 && Math.floor(width / side) * Math.floor(height / side) < count) side -= 0.25;
  return side;
}
