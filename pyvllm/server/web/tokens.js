// Text as it streams in, one element a token where probabilities came along, and what is shown about a token.

const LEVELS = [0.1, 0.3, 0.6, 0.9];
const MARGIN_PX = 8;

/** A chunk's tokens as `{text, entries}`: what a token adds to the text, and [token, log-probability] pairs, its own first. */
export function tokensOfChat(logprobs, decoder) {
  return (logprobs?.content ?? []).map((one) => ({
    // Bytes, as a token may hold part of a character.
    text: one.bytes ? decoder.decode(new Uint8Array(one.bytes), { stream: true }) : one.token,
    entries: [one, ...one.top_logprobs].map((entry) => [entry.token, entry.logprob]),
  }));
}

export function tokensOfCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((token, i) => ({
    text: token.includes("\ufffd") ? "" : token,
    entries: [[token, logprobs.token_logprobs[i]], ...Object.entries(logprobs.top_logprobs[i] ?? {})],
  }));
}

/** Text of an element, which grows. It is never taken for markup. */
export class TokenText {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    // Text that is not shown, tokens whose text is not shown, and tokens that only begin a character.
    this.unseen = "";
    this.waiting = [];
    this.begun = [];
    this.hasToken = false;
  }

  add(text, tokens) {
    this.text += text;
    this.unseen += text;
    this.waiting.push(...tokens);
  }

  /** Show what fits together. The text is what counts: tokens that it does not hold, such as special ones, are dropped. */
  draw() {
    const nodes = [];
    let used = 0;
    let from = 0;
    for (; used < this.waiting.length && from < this.unseen.length; used += 1) {
      const token = this.waiting[used];
      const piece = [token.text, token.text.trimStart()].find((one) => this.unseen.startsWith(one, from));
      // The rest of its text is still to come.
      if (piece === undefined && token.text.startsWith(this.unseen.slice(from))) break;
      if (piece === undefined) continue;
      this.begun.push(token.entries);
      if (!piece) continue;
      nodes.push(this.element(piece));
      from += piece.length;
    }
    this.waiting.splice(0, used);
    if (!this.waiting.length && from < this.unseen.length) {
      const rest = this.unseen.slice(from);
      nodes.push(this.begun.length ? this.element(rest) : rest);
      from = this.unseen.length;
    }
    this.unseen = this.unseen.slice(from);
    this.parent.append(...nodes);
  }

  /** An element for the tokens of a text. */
  element(text) {
    const span = document.createElement("span");
    span.className = `token p${level(this.begun[0][0][1])}`;
    span.textContent = text;
    span.tabIndex = this.hasToken ? -1 : 0;
    this.hasToken = true;
    entriesOf.set(span, this.begun);
    this.begun = [];
    return span;
  }

  /** No more will come. */
  end() {
    this.draw();
    this.waiting = [];
    this.draw();
  }
}

const entriesOf = new WeakMap();

function level(logprob) {
  return logprob === null ? LEVELS.length : LEVELS.filter((least) => Math.exp(logprob) >= least).length;
}

function percent(logprob) {
  if (logprob === null) return "";
  const value = 100 * Math.exp(logprob);
  return value >= 0.1 || value === 0 ? `${value.toFixed(1)} %` : "< 0.1 %";
}

/** Show probabilities of tokens inside `root` on hover, focus and touch, in `tip`. */
export function explainTokens(root, tip) {
  let shown = null;

  function hide() {
    shown?.removeAttribute("aria-describedby");
    shown?.classList.remove("shown");
    shown = null;
    tip.hidden = true;
  }

  function show(span) {
    if (span === shown) return;
    hide();
    shown = span;
    tip.replaceChildren(...entriesOf.get(span).map(tableOf));
    tip.hidden = false;
    span.setAttribute("aria-describedby", tip.id);
    span.classList.add("shown");
    place(tip, boxOf(span));
  }

  // What has the focus may have been scrolled into view just now.
  function follow() {
    if (shown && shown === document.activeElement) place(tip, boxOf(shown));
    else hide();
  }

  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) show(span);
    else if (shown !== document.activeElement) hide();
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", (event) => event.target.matches(".token") && show(event.target));
  root.addEventListener("focusout", hide);
  root.addEventListener("scroll", follow, { passive: true });
  window.addEventListener("scroll", follow, { passive: true });
  root.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && event.target.matches(".token")) {
      event.preventDefault();
      moveFocus(root, event.target, step);
    }
  });
}

/** Tab stops at one token of a text; the arrow keys go to the others. */
function moveFocus(root, span, step) {
  const spans = [...root.querySelectorAll(".token")];
  const next = spans[spans.indexOf(span) + step];
  if (!next) return;
  if (next.parentElement === span.parentElement) span.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function tableOf(entries) {
  const table = document.createElement("table");
  entries.forEach(([token, logprob], i) => {
    // The token itself comes first, and again among the best.
    if (i && token === entries[0][0]) return;
    const row = table.insertRow();
    row.className = i ? "" : "own";
    row.insertCell().textContent = JSON.stringify(token);
    row.insertCell().textContent = percent(logprob);
    row.insertCell().textContent = logprob === null ? "" : logprob.toFixed(3);
  });
  return table;
}

/** Where its first line is. */
function boxOf(span) {
  return span.getClientRects()[0] ?? span.getBoundingClientRect();
}

function place(tip, box) {
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - MARGIN_PX);
  const below = box.bottom + MARGIN_PX / 2;
  const fits = below + tip.offsetHeight < document.documentElement.clientHeight;
  tip.style.left = `${Math.max(MARGIN_PX, left)}px`;
  tip.style.top = `${fits ? below : Math.max(0, box.top - tip.offsetHeight - MARGIN_PX / 2)}px`;
}
