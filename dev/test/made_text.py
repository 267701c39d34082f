#!/usr/bin/env python3
"""Writes text that is the same on every machine and in every revision, for tests that compare training curves.

  dev/test/made_text.py FILE [BYTES]

Sentences of made-up words: how often a word occurs follows Zipf's law, and each word prefers a few others to come after it, so a
model has spelling, frequencies and pairs to learn. Only random.random() is drawn from, whose sequence Python keeps for a seed.
"""
import random, sys

WORDS, FOLLOWERS = 2000, 4


def make_words(draw):
    syllables = [a + b for a in "bdfgklmnprstv" for b in "aeiou"]
    words = []
    while len(words) < WORDS:
        word = "".join(syllables[int(draw() * len(syllables))] for _ in range(1 + int(3 * draw() * draw() * 2)))
        if word not in words:
            words.append(word)
    return sorted(words, key=len)  # as in real text, the frequent ones are short


def pick(draw):
    """A word's rank, about 1/(rank + 1) often."""
    return min(int(WORDS ** draw()) - 1, WORDS - 1)


def main():
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and not sys.argv[2].isdigit()):
        sys.exit("usage: dev/test/made_text.py FILE [BYTES]")
    draw = random.Random(20240520).random
    words, size = make_words(draw), int(sys.argv[2]) if len(sys.argv) == 3 else 1200000
    followers = [[pick(draw) for _ in range(FOLLOWERS)] for _ in words]
    text, at, length = [], 0, 0
    while length < size:
        at = followers[at][int(draw() * FOLLOWERS)] if draw() < 0.5 else pick(draw)
        end = draw()
        text.append(words[at] + (".\n\n" if end < 0.005 else ". " if end < 0.08 else ", " if end < 0.16 else " "))
        length += len(text[-1])
    with open(sys.argv[1], "w", encoding="ascii", newline="\n") as f:
        f.write("".join(text))


if __name__ == "__main__":
    main()
