"""Searches texts by meaning: `semantic_search.py [--router HOST:PORT] QUERY TEXT...`.

The router serves a model for vectors. Texts are compared by the cosine of the angle between their vectors and that of
the query. With `--rerank HOST:PORT` the best ones are put in order by a reranker, which reads query and text together.
"""

from __future__ import annotations

import argparse
import sys

from fissile.client import Client, FissileError

# Models for vectors want different texts before a query; this is the form of Qwen3-Embedding.
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "


def search(client: Client, query: str, texts: list[str], top: int) -> list[tuple[float, str]]:
    """The texts that are nearest to the query, the best one first, with their similarity from -1 to 1."""
    answer = client.embed([INSTRUCTION + query, *texts])
    wanted, *vectors = ([*embedding.values] for embedding in answer.embeddings)
    # Vectors have length 1: the cosine is the sum of products.
    found = [sum(a * b for a, b in zip(wanted, vector, strict=True)) for vector in vectors]
    return sorted(zip(found, texts, strict=True), reverse=True)[:top]


def rerank(client: Client, query: str, texts: list[str]) -> list[tuple[float, str]]:
    """The same texts in order of their relevance, from 0 to 1."""
    answer = client.rerank(query, texts, return_documents=True)
    return [(one.relevance, one.document) for one in answer.documents]


def main(arguments: list[str]) -> int:
    """Prints the best texts, a line each; 1 if a call fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--router", default="127.0.0.1:50051", help="Router of a model for vectors. Default: 127.0.0.1:50051."
    )
    parser.add_argument("--rerank", help="Router of a reranker. Default: none.")
    parser.add_argument("--top", type=int, default=3, help="Texts to print. Default: 3.")
    parser.add_argument("query", metavar="QUERY", help="Words to search by.")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="Texts to search in.")
    given = parser.parse_args(arguments)
    try:
        with Client(given.router) as client:
            best = search(client, given.query, given.texts, given.top)
        if given.rerank:
            with Client(given.rerank) as client:
                best = rerank(client, given.query, [text for _, text in best])
    except (FissileError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for score, text in best:
        print(f"{score:.4f}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
