// The form of sampling parameters.

const FLOATS = ["temperature", "top_p", "min_p"];
const INTEGERS = ["top_k", "max_tokens", "seed"];
const ESCAPES = { n: "\n", r: "\r", t: "\t", "\\": "\\" };
export const ALTERNATIVES = 5;

function readNumber(input, integer) {
  const { badInput, rangeUnderflow, rangeOverflow } = input.validity;
  const value = input.valueAsNumber;
  if (badInput || rangeUnderflow || rangeOverflow || (integer && !Number.isNaN(value) && !Number.isSafeInteger(value))) {
    return { error: `${input.parentElement.textContent.trim()}: ${input.validationMessage || "an integer is needed"}` };
  }
  return { value: Number.isNaN(value) ? undefined : value };
}

/** Lines of a text, in which \n, \r, \t and \\ stand for what cannot be typed into one. */
export function stopStrings(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nrt\\])/g, (_, letter) => ESCAPES[letter]));
}

/** The request's fields as `{fields, logprobs}`, or `{error, input}` naming the first that is wrong. */
export function readSettings(form) {
  const fields = {};
  for (const name of [...FLOATS, ...INTEGERS]) {
    const input = form.elements[name];
    const { value, error } = readNumber(input, INTEGERS.includes(name));
    if (error) return { error, input };
    if (value !== undefined) fields[name] = value;
  }
  const stop = stopStrings(form.elements.stop.value);
  if (stop.length) fields.stop = stop;
  return { fields, logprobs: form.elements.logprobs.checked };
}
