// A line of tokens a second over the last minute.

import { fitCanvas } from "./block_map.js";

const SPAN_S = 60;
const HEIGHT_PX = 56;

export class RateChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** `time`: seconds, by the server's clock. */
  add(time, rate) {
    this.points.push({ time, rate });
    while (this.points[0].time < time - SPAN_S) this.points.shift();
    this.draw();
    const highest = Math.max(...this.points.map((point) => point.rate));
    this.canvas.setAttribute(
      "aria-label",
      `Tokens generated a second in the last minute: now ${rate.toFixed(0)}, at most ${highest.toFixed(0)}`,
    );
  }

  clear() {
    this.points = [];
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const context = fitCanvas(this.canvas, width, HEIGHT_PX);
    const style = getComputedStyle(this.canvas);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = style.getPropertyValue("--faint");
    context.fillRect(0, HEIGHT_PX - 1, width, 1);
    if (this.points.length < 2) return;
    const highest = Math.max(...this.points.map((point) => point.rate));
    context.textBaseline = "top";
    context.fillText(`at most ${highest.toFixed(0)} output tokens/s`, 0, 0);
    const now = this.points.at(-1).time;
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    for (const { time, rate } of this.points) {
      const x = width * (1 - (now - time) / SPAN_S);
      context.lineTo(x, HEIGHT_PX - 2 - (rate / Math.max(1, highest)) * (HEIGHT_PX - 18));
    }
    context.stroke();
  }
}
