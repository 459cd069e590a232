// A picture of the KV pool: one square a block, or one for several where there are too many.

const MIN_CELL_PX = 3;
const MAX_CELL_PX = 18;
const HEIGHT_PX = 220;
const MAX_HEIGHT_PX = 420;
const NUMBER_FROM_PX = 13;
const MARK_FROM_PX = 5;
const GOLDEN_ANGLE = 137.508;
const FIRST_HUE = 250;

/** Columns of runs, as the server sends them -> arrays with an entry for each block. */
export function expandRuns({ lengths, ref_counts: refCounts, owners, cached }) {
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const blocks = { refs: new Uint32Array(total), owners: new Int32Array(total), cached: new Uint8Array(total) };
  let start = 0;
  lengths.forEach((length, i) => {
    const end = start + length;
    blocks.refs.fill(refCounts[i], start, end);
    blocks.owners.fill(owners[i], start, end);
    blocks.cached.fill(cached[i], start, end);
    start = end;
  });
  return blocks;
}

/** How many blocks are in which state. */
export function countBlocks({ refs, cached }) {
  const counts = { single: 0, shared: 0, cached: 0, free: 0 };
  for (let i = 0; i < refs.length; i += 1) {
    if (refs[i] > 1) counts.shared += 1;
    else if (refs[i]) counts.single += 1;
    else if (cached[i]) counts.cached += 1;
    else counts.free += 1;
  }
  return counts;
}

/** Blocks that each request holds, by its index; a shared one counts for the request that is named. */
export function blocksByOwner({ owners }, numRequests) {
  const counts = new Array(numRequests).fill(0);
  for (const owner of owners) if (owner >= 0) counts[owner] += 1;
  return counts;
}

/** Gives each request a hue for as long as it lives, far from those of the others. */
export class Hues {
  constructor() {
    this.numbers = new Map();
  }

  /** The hues of these requests, in degrees. Those of others are free again. */
  of(requests) {
    const kept = new Map();
    for (const { request_id: id } of requests) if (this.numbers.has(id)) kept.set(id, this.numbers.get(id));
    const taken = new Set(kept.values());
    let next = 0;
    for (const { request_id: id } of requests) {
      if (kept.has(id)) continue;
      while (taken.has(next)) next += 1;
      kept.set(id, next);
      taken.add(next);
    }
    this.numbers = kept;
    return requests.map(({ request_id: id }) => Math.round((FIRST_HUE + kept.get(id) * GOLDEN_ANGLE) % 360));
  }
}

/** Largest squares with which all blocks fit. The least ones may take more height, then a square stands for several. */
export function gridFor(numBlocks, width) {
  const columnsOf = (cell) => Math.max(1, Math.floor(width / cell));
  let cell = MAX_CELL_PX;
  while (cell > MIN_CELL_PX && Math.ceil(numBlocks / columnsOf(cell)) * cell > HEIGHT_PX) cell -= 1;
  const columns = columnsOf(cell);
  const each = Math.max(1, Math.ceil(numBlocks / (columns * Math.floor(MAX_HEIGHT_PX / cell))));
  return { cell, columns, each, rows: Math.ceil(numBlocks / (each * columns)) };
}

export class BlockMap {
  /** `tip`: element that tells about the block under the pointer or the cursor. */
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.rest = tip.textContent;
    this.blocks = null;
    this.requests = [];
    this.hues = [];
    this.chosen = -1;
    canvas.addEventListener("pointermove", (event) => this.choose(this.cellAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.choose(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.choose(-1));
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.choose(Math.max(0, this.chosen)));
    canvas.addEventListener("blur", () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** `hues`: of each request. */
  update(blocks, requests, hues) {
    this.blocks = blocks;
    this.requests = requests;
    this.hues = hues;
    this.draw();
    this.describe();
  }

  get numCells() {
    return this.grid ? Math.ceil(this.blocks.refs.length / this.grid.each) : 0;
  }

  onKey(event) {
    if (!this.grid) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.grid.columns, ArrowUp: -this.grid.columns };
    const next = this.chosen + (steps[event.key] ?? 0);
    if (!(event.key in steps)) return;
    event.preventDefault();
    if (next >= 0 && next < this.numCells) this.choose(next);
  }

  cellAt({ offsetX, offsetY }) {
    if (!this.grid) return -1;
    const column = Math.floor(offsetX / this.grid.cell);
    const index = Math.floor(offsetY / this.grid.cell) * this.grid.columns + column;
    return column >= 0 && column < this.grid.columns && index >= 0 && index < this.numCells ? index : -1;
  }

  choose(cell) {
    if (cell === this.chosen) return;
    this.chosen = cell;
    this.draw();
    this.describe();
  }

  describe() {
    const text = this.chosen < 0 || this.chosen >= this.numCells ? this.rest : this.textOf(this.chosen);
    // Setting it again would have it read out again.
    if (this.tip.textContent !== text) this.tip.textContent = text;
  }

  textOf(cell) {
    const { each } = this.grid;
    const last = Math.min(this.blocks.refs.length, (cell + 1) * each) - 1;
    const i = this.busiest(cell);
    const place = each === 1 ? `Block ${i}` : `Blocks ${cell * each} to ${last}, such as ${i}`;
    const refs = this.blocks.refs[i];
    const cached = this.blocks.cached[i] ? "in the prefix cache" : "not in the prefix cache";
    if (!refs) return `${place}: free, ${cached}`;
    const owner = this.requests[this.blocks.owners[i]]?.request_id ?? "a request";
    const held = refs === 1 ? `held by ${owner}` : `held ${refs} times, by ${owner} among others`;
    return `${place}: ${held}, ${cached}`;
  }

  /** The block that stands for a square: the one that most hold. */
  busiest(cell) {
    const { refs, cached } = this.blocks;
    const end = Math.min(refs.length, (cell + 1) * this.grid.each);
    let best = cell * this.grid.each;
    for (let i = best + 1; i < end; i += 1) {
      if (refs[i] > refs[best] || (refs[i] === refs[best] && cached[i] > cached[best])) best = i;
    }
    return best;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.blocks || !width) return;
    const grid = (this.grid = gridFor(this.blocks.refs.length, width));
    const context = fitCanvas(this.canvas, grid.columns * grid.cell, grid.rows * grid.cell);
    const style = getComputedStyle(this.canvas);
    const colors = Object.fromEntries(
      ["free", "cached", "surface", "text"].map((name) => [name, style.getPropertyValue(`--${name}`)]),
    );
    const tone = style.getPropertyValue("--owner-tone");
    const owned = this.hues.map((hue) => `oklch(${tone} ${hue})`);
    for (let cell = 0; cell < this.numCells; cell += 1) this.drawCell(context, cell, colors, owned);
  }

  drawCell(context, cell, colors, owned) {
    const { cell: size, columns } = this.grid;
    const i = this.busiest(cell);
    const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
    const inner = size - (size > MARK_FROM_PX ? 2 : 1);
    const refs = this.blocks.refs[i];
    if (refs) {
      context.fillStyle = owned[this.blocks.owners[i]] ?? colors.text;
      context.fillRect(x, y, inner, inner);
      if (refs > 1) drawCount(context, x, y, inner, refs, colors.surface);
    } else {
      context.fillStyle = this.blocks.cached[i] ? colors.cached : colors.free;
      context.fillRect(x, y, inner, inner);
    }
    if (cell === this.chosen) {
      context.strokeStyle = colors.text;
      context.lineWidth = 2;
      context.strokeRect(x, y, inner, inner);
    }
  }
}

/** A block that several hold: how many, or a hole where there is no room for the number. */
function drawCount(context, x, y, size, refs, color) {
  context.fillStyle = color;
  if (size < NUMBER_FROM_PX) {
    const hole = Math.max(1, Math.round(size / 3));
    const from = Math.floor((size - hole) / 2);
    context.fillRect(x + from, y + from, hole, hole);
    return;
  }
  context.font = `600 ${refs < 100 ? size - 5 : size - 8}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(refs < 1000 ? refs : "+", x + size / 2, y + size / 2 + 1);
}

/** Give a canvas a size in CSS pixels, sharp on any screen. Returns a cleared context that draws in them. */
export function fitCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    [canvas.width, canvas.height] = [pixelWidth, pixelHeight];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
