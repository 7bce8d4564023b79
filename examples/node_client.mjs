import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const HELP = `Asks a running router from Node and streams its answer.

    npm install @grpc/grpc-js @grpc/proto-loader
    node examples/node_client.mjs [HOST:PORT] [PROMPT]

HOST:PORT is the router, by default 127.0.0.1:50051, where \`fissile serve\` listens; PROMPT is the message to the model.`;
const given = parseArgs({ options: { help: { type: "boolean", short: "h" } }, allowPositionals: true });
if (given.values.help) {
  console.log(HELP);
  process.exit();
}
// Behind the help, which needs neither.
const { default: grpc } = await import("@grpc/grpc-js");
const { default: loader } = await import("@grpc/proto-loader");

const [address = "127.0.0.1:50051", prompt = "Tell me a story."] = given.positionals;
const protos = join(dirname(fileURLToPath(import.meta.url)), "..", "protos");

// `defaults` makes absent fields appear with their default; `longs` and `enums` as strings are exact and readable.
const definition = loader.loadSync("fissile/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  defaults: true,
  longs: String,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).fissile.v1;
const router = new InferenceService(address, grpc.credentials.createInsecure());

const call = router.Chat(
  { messages: [{ role: "user", content: prompt }], sampling_params: { max_tokens: 128 } },
  { deadline: Date.now() + 60_000 },
);
call.on("data", (part) => {
  process.stdout.write(part.delta.content);
  if (part.finish) console.log(`\n${part.finish.reason}, ${part.finish.usage.completion_tokens} tokens`);
});
call.on("error", (error) => {
  console.error(`error: ${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
