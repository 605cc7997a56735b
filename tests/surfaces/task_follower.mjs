// Follows tasks of a belljar server with the npm packages `@modelcontextprotocol/client` and `ext-tasks`.
// Usage: node task_follower.mjs URL '{"tool": …, "arguments": {…}, "answer": …, "cancel": …, "handoff": …, "resume": …}'
// Prints one JSON object: what the caller of the packages got, and how many requests of each method were sent.
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { createTaskSessionFromClient } from "@modelcontextprotocol/ext-tasks/client";

const [url, text] = process.argv.slice(2);
const wanted = JSON.parse(text);
const protocolVersion = "2026-07-28";
const clientInfo = { name: "task-follower", version: "1" };
const clientCapabilities = { elicitation: { form: {} } };
const sent = {};
let id = 0;

// The packages leave the requests of the extension to their host: one POST each.
async function rawDispatch(request) {
  sent[request.method] = (sent[request.method] ?? 0) + 1;
  const params = request.params ?? {};
  const response = await fetch(url, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      accept: "application/json, text/event-stream",
      "mcp-protocol-version": protocolVersion,
      "mcp-method": request.method,
      "mcp-name": params.taskId ?? params.name,
    },
    body: JSON.stringify({ ...request, jsonrpc: "2.0", id: ++id }),
  });
  const body = await response.text();
  const messages = body.startsWith("{") ? [body] : [...body.matchAll(/^data: (\{.*\})\r?$/gm)].map((found) => found[1]);
  const answer = messages.map((message) => JSON.parse(message)).find((message) => message.id === id);
  return answer.error ? { kind: "error", error: answer.error } : { kind: "result", result: answer.result };
}

const client = new Client(clientInfo, { capabilities: clientCapabilities, versionNegotiation: { mode: { pin: protocolVersion } } });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const asked = [];
const session = createTaskSessionFromClient(client, {
  endpointId: "belljar",
  rawDispatch,
  v2RequestFraming: { protocolVersion, clientInfo, clientCapabilities },
  onInputRequest: async (request) => {
    asked.push(request.params.message);
    return { action: "accept", content: { answer: wanted.answer } };
  },
});
const execution = wanted.resume
  ? await session.resumeTask(wanted.resume)
  : await session.callTool(wanted.tool, wanted.arguments);
const told = { kind: execution.kind, taskId: execution.handle?.taskId, asked, sent };
if (wanted.handoff) {
  told.reference = execution.serializeReference();
  await execution.detach();
} else {
  if (wanted.cancel) await execution.cancel();
  const { outcome } = await execution.settle();
  told.status = outcome.status;
  told.result = outcome.result;
}
console.log(JSON.stringify(told));
process.exit(0);
