// Requests to this server, with the key that the user typed in. Addresses are relative, so that a proxy may add a prefix.

const STORED_KEY = "pyvllm-key";

/** What the server answered instead of what was asked for; status 0: it did not answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fired on `keys` when the key has changed. */
export const keys = new EventTarget();

// Kept in the tab, and gone with it. Pages that may store nothing keep it in memory.
let key = "";
try {
  key = sessionStorage.getItem(STORED_KEY) ?? "";
} catch {
  // Storage is turned off.
}

/** Take a key, or none if it is empty. Throws if no header can hold it. */
export function setKey(text) {
  if (!/^[\x21-\x7e]*$/.test(text)) {
    throw new Error("A key has only visible ASCII characters.");
  }
  key = text;
  try {
    sessionStorage.setItem(STORED_KEY, key);
  } catch {
    // Storage is turned off.
  }
  keys.dispatchEvent(new Event("change"));
}

/** Whether a key was given. */
export function hasKey() {
  return key !== "";
}

async function send(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await errorText(response));
  return response;
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The JSON at a path. */
export async function getJson(path, signal) {
  return (await send(path, undefined, signal)).json();
}

/** The chunks of a streamed answer. Throws ApiError, also for an error in the middle, and what aborting throws. */
export async function* stream(path, body, signal) {
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      // Split only what is new: the rest has no end of a line.
      const lines = value.split("\n");
      lines[0] = rest + lines[0];
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
    throw new ApiError(0, "The connection broke in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError(0, "The answer ended too early.");
}
