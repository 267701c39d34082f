#!/usr/bin/env python3
"""The corpora and the runs of the loss-gap comparison: data/clean.py on small made texts, data/gap.py on packages made here, its manifest and its
checksums, and scripts/run_30M_gap.sh with a program that only pretends to train. Standard library only, no network."""

import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "data"))
sys.path.insert(0, os.path.join(ROOT, "dev", "bench"))
import clean      # noqa: E402
import cost       # noqa: E402
import gap        # noqa: E402

SCRIPT = os.path.join(ROOT, "scripts", "run_30M_gap.sh")
PROSE = "This is a sentence that people have written, and it says what it is for in the words of the language."
OTHER = "There was no other way for them to do it, so they went out and did what all of us would have done."


class Report(unittest.TestCase):
    """dev/bench/gap/report.py on a summary whose orders are worked out by hand."""
    HEAD = "recipe,seeds,val_loss,gap,spread,bits_per_byte,tokens_per_s,memory_gib\n"

    def report(self, text, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "summary.csv")
            with open(path, "w") as f:
                f.write(text)
            return subprocess.run([sys.executable, os.path.join(ROOT, "dev", "bench", "gap", "report.py"), path, *arguments], capture_output=True, text=True)

    def test_orders_that_the_spread_carries(self):
        """0.040 and 0.052 are 0.012 apart, over 0.010 and 0.011; 0.052 and 0.060 are not; one seed alone has the largest spread, 0.011."""
        r = self.report(self.HEAD + "bf16,3,3.1,0,0.004,1,1234567.8,8\nquartet2,3,3.152,0.052,0.011,,1,8\nnvidia,3,3.14,0.040,0.010,,1,8\nfp8,1,3.16,0.060,,,1,8\n")
        self.assertEqual(r.returncode, 0, r.stderr)
        lines = r.stdout.splitlines()
        self.assertIn("| `bf16` | 3 | 3.1000 | - | 0.0040 | - | 1 234 568 | 8.00 |", lines)
        self.assertIn("| `quartet2` | 3 | 3.1520 | +0.0520 | 0.0110 | +0.0430 | 1 | 8.00 |", lines)
        self.assertIn("| `fp8` | 1 | 3.1600 | +0.0600 | - | - | 1 | 8.00 |", lines)
        self.assertEqual([l for l in lines if "is below" in l], ["bf16 is below nvidia, quartet2, fp8 by more than the spread", "nvidia is below quartet2, fp8 by more than the spread",
                                                                "quartet2 is below none by more than the spread", "fp8 is below none by more than the spread"])
        self.assertEqual(lines[-1], "of 3 orders that the spread carries among the paper's recipes, 2 are the paper's; not: nvidia below quartet2")

    def test_one_seed_carries_nothing(self):
        r = self.report(self.HEAD + "bf16,1,3.1,0,,1,1,8\nquartet2,1,3.2,0.1,,1,1,8\n")
        self.assertIn("bf16 is below none by more than the spread", r.stdout)

    def test_not_a_summary(self):
        for text in ("recipe,seeds\nbf16,1\n", self.HEAD + "bf16,one,3,0,,1,1,8\n"):
            r = self.report(text)
            self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1), r.stderr)
            self.assertIn("is not a summary.csv", r.stderr)


class Cleaners(unittest.TestCase):
    def test_html(self):
        page = f"""<html><head><title>T</title><style>p {{}}</style></head><body class="wy-body-for-nav"><!-- <p>{OTHER}</p> -->
            <div class="navheader"><div><p>{OTHER}</p></div><p>{OTHER}</p></div><nav><p>{OTHER}</p></nav><script>if (a<b) {{ {OTHER} }}</script>
            <h1>A &amp; B<a class="headerlink" href="#x">#</a></h1><div class="wy-nav-content"><p>{PROSE[:40]}<b>{PROSE[40:]}</b>
            <h2>Empty</h2><pre>{OTHER}</pre><div class='highlight-c x'><p>{OTHER}</p></div><ul><li>Home<li>Next</ul>
            <h3>Last</h3><p>Caf&eacute;: {PROSE}</p></div></body></html>"""
        self.assertEqual(clean.html_paragraphs(page), ["A & B", PROSE, "Last", f"Caf\u00e9: {PROSE}"])

    def test_mallard(self):
        page = f'<page xmlns="x" id="i"><info><desc>{OTHER}</desc></info><title>Sound</title><p>{PROSE}</p><code-block>x</code-block><screen>{OTHER}</screen></page>'
        self.assertEqual(clean.html_paragraphs(page), ["Sound", PROSE])

    def test_rfc(self):
        text = (f"1.  Introduction\n\n   {PROSE[:48]}\n   {PROSE[49:-1]},\n\n\n\nPostel                   [Page 1]\n\x0c\nRFC 1        Title      April 1969\n\n\n"
                f"   and goes on. {OTHER}\n\n   +-----+-----+\n   | {OTHER} | it is |\n   +-----+-----+\n\n   1. {OTHER} ....... 7\n\n2.  Nothing\n\n3.  End\n\n   {OTHER}\n")
        self.assertEqual(clean.text_paragraphs(text), ["1. Introduction", f"{PROSE[:-1]}, and goes on. {OTHER}", "3. End", OTHER])

    def test_a_page_that_ends_a_sentence_ends_the_paragraph(self):
        self.assertEqual(clean.text_paragraphs(f"{PROSE}\n\nA  [Page 1]\n\x0c\nRFC 1  B\n\n{OTHER}\n"), [PROSE, OTHER])

    def test_info(self):
        text = (f"This is x.info.\n\x1f\nFile: x.info,  Node: Top,  Next: One,  Up: (dir)\n\nOne\n***\n\n{PROSE}  *Note The rest::.\n\n* Menu:\n\n"
                f"* Two::        {OTHER}\n\x1f\nTag Table:\nNode: Top\x7f12 {OTHER}\n\x1f\nEnd Tag Table\n")
        self.assertEqual(clean.info_paragraphs(text), ["One", f"{PROSE} The rest."])

    def test_pod(self):
        text = f"=head1 NAME\n\nI<{PROSE}> See C<< a->b >> and L<perl>.\n\n    my $x; # {OTHER}\n\n=for html {OTHER}\n\n=cut\n"
        self.assertEqual(clean.pod_paragraphs(text), ["NAME", f"{PROSE} See a->b and perl."])

    def test_dictionary(self):
        wordnet = "00-database-info\n    about\nabaca\n    n 1: a kind of hemp [syn: {abaca},\n         {hemp}]\n    v 2: to do it\nabacus\n    n 1: a tablet\n"
        self.assertEqual(list(clean.dictionary_documents(wordnet)),
                         [["abaca", "n 1: a kind of hemp [syn: abaca, hemp]", "v 2: to do it"], ["abacus", "n 1: a tablet"]])
        entry = "Codlin \\Cod\"lin\\, Codling \\Cod\"ling\\, n. [Cf. AS. {apple} a\n   quince.]\n   An apple.\n   [1913 Webster]\n\nOther\n   It.\n"
        self.assertEqual(list(clean.dictionary_documents(entry)), [['Codlin \\Cod"lin\\, Codling \\Cod"ling\\, n. [Cf. AS. apple a quince.] An apple.'], ["Other", "It."]])

    def test_code_is_kept_as_it_is(self):
        self.assertEqual(list(clean.code_documents("\n\tint a;\n\n \n\tint b;\n\n")), [["\tint a;", "\tint b;"]])
        self.assertEqual(list(clean.code_documents("a\x1eb\n")), [])       # the character that will separate documents

    def test_prose(self):
        self.assertTrue(clean.is_prose(PROSE))
        for text in ("for (int i = 0; i < n; i++) { a[i] = b[i] + c[i] * d; if (is_x(a) && to_y(b)) the_end(); }",
                     "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron", "It is for the best.",
                     "Introduction to the use of this and that for all of you ..... 12"):
            self.assertFalse(clean.is_prose(text), text)


class Repeats(unittest.TestCase):
    def test_paragraphs_and_documents(self):
        d = clean.Deduplicator()
        long = [f"{PROSE} {OTHER} {w} is a word that is not in the others." for w in ("Alpha", "Beta", "Gamma", "Delta", "Epsilon")]
        first = d.document(["Head", *long[:3]], 100)
        self.assertEqual(first.decode(), "\n\n".join(["Head", *long[:3]]) + "\n")
        # Other numbers and capitals are no difference; a heading goes with its paragraph, and stays with one that stays.
        self.assertEqual(d.document(["Head", long[0].upper() + " 17", "Kept", long[3]], 100).decode(), f"Kept\n\n{long[3]}\n")
        self.assertIsNone(d.document(["Head", long[0]], 100))
        self.assertIsNone(d.document([OTHER], 400))
        self.assertEqual((d.documents, d.repeated, d.short, d.foreign), (2, 2, 2, 0))

    def test_other_languages(self):
        d = clean.Deduplicator()
        german = "Das ist ein Satz, den jemand geschrieben hat, und er sagt, wozu er da ist, in den Worten der Sprache, die wir alle kennen."
        self.assertIsNone(d.document([german], 50))
        self.assertEqual(d.foreign, 1)
        self.assertIsNotNone(clean.Deduplicator().document([german], 50, english=False))


def make_deb(path, files, compression="xz"):
    """A .deb of {name: bytes}: an ar archive of three members."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo("./" + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (f"data.tar.{compression}", data.getvalue())]
    with open(path, "wb") as f:
        f.write(b"!<arch>\n")
        for name, content in members:
            f.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2))


class Packages(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="quartet gap ")
        self.addCleanup(shutil.rmtree, self.tmp)

    def row(self, package, files, pattern, cleaner="html", corpus="english", version="1:2-3"):
        row = {"corpus": corpus, "package": package, "version": version, "arch": "all", "cleaner": cleaner, "files": pattern}
        path = os.path.join(self.tmp, gap.deb_name(row))
        make_deb(path, files)
        return {**row, "size": str(os.path.getsize(path)), "sha256": gap.sha256_file(path)}

    def rows(self):
        page = lambda *words: "".join(f"<p>{PROSE} {OTHER} {w * 200} is the word of this, and it is not that of the others.</p>" for w in words).encode()
        inner = io.BytesIO()
        with tarfile.open(fileobj=inner, mode="w:xz") as tar:
            info = tarfile.TarInfo("linux/a.c")
            info.size = 600
            tar.addfile(info, io.BytesIO(b"int a;\n" * 85 + b"12345"))
        return [self.row("aaa-doc", {"b.html": page("b", "c"), "a.html": page("a", "c"), "skip.txt": b"x"}, r"\.html$"),
                self.row("bbb-doc", {"c.html.gz": gzip.compress(page("c", "d", "e")), "l.html": b"<p>Stra\xdfe: " + page("f", "g")[3:]}, r"html(\.gz)?$"),
                self.row("src", {"usr/src/x.tar.xz": inner.getvalue()}, r"usr/src/x.tar.xz::\.c$", "code", "code")]

    def test_the_text_is_the_same_by_any_number_of_workers(self):
        rows, texts = self.rows(), []
        self.assertEqual(gap.missing_debs(rows, self.tmp), [])
        for workers in (1, 2):
            seen = []
            documents, repeats = gap.gather(rows, self.tmp, workers, lambda row, n, size: seen.append((row["package"], n)))
            self.assertEqual(seen, [("aaa-doc", 2), ("bbb-doc", 2), ("src", 1)])
            self.assertEqual(repeats["english"].repeated, 2)               # "c": in b.html, the second by name, and in c.html.gz
            gap.write_text(os.path.join(self.tmp, "text.txt"), documents)
            with open(os.path.join(self.tmp, "text.txt"), "rb") as f:
                texts.append(f.read())
        self.assertEqual(texts[0], texts[1])
        parts = texts[0].decode("utf-8").split(gap.SEPARATOR)
        self.assertEqual((len(parts), len(set(parts))), (5, 5))
        self.assertEqual(sum("Stra\u00dfe" in p for p in parts), 1)        # not UTF-8: read as Windows-1252

    def test_errors_are_one_line(self):
        rows = self.rows()
        with self.assertRaisesRegex(gap.Failure, r"no file matches 'nothing'"):
            gap.clean_package((os.path.join(self.tmp, gap.deb_name(rows[0])), "html", "nothing"))
        path = os.path.join(self.tmp, gap.deb_name(rows[1]))
        with open(path, "r+b") as f:
            f.seek(200)
            f.write(b"damage")
        with self.assertRaisesRegex(gap.Failure, "SHA-256 .* remove the file and run again"):
            gap.missing_debs(rows, self.tmp)
        with self.assertRaisesRegex(gap.Failure, "bbb-doc.*remove it and run again"):
            gap.clean_package((path, "html", "html"))
        os.remove(path)
        self.assertEqual([r["package"] for r in gap.missing_debs(rows, self.tmp)], ["bbb-doc"])

    def test_checksums(self):
        out, sums = os.path.join(self.tmp, "gap-english"), os.path.join(self.tmp, "sums.txt")
        os.mkdir(out)
        for name in ("text.txt", "train_000000.bin", "val_000000.bin", "tokenizer.bin", "tokenizer.json", "meta.json"):
            with open(os.path.join(out, name), "w") as f:
                f.write(name)
        gap.record("code", out, sums)
        with self.assertRaisesRegex(gap.Failure, "nothing of gap-english"):
            gap.check("english", out, sums)
        gap.record("english", out, sums)
        gap.check("english", out, sums)
        r = subprocess.run(["sha256sum", "-c", "--quiet", "--ignore-missing", sums], cwd=self.tmp, capture_output=True, text=True)
        self.assertEqual((r.returncode, r.stdout), (0, ""))
        self.assertNotIn("meta.json", gap.read_checksums(sums))
        with open(os.path.join(out, "train_000001.bin"), "w") as f:
            f.write("one shard too many")
        with self.assertRaisesRegex(gap.Failure, "train_000001.bin: is not in"):
            gap.check("english", out, sums)
        with open(os.path.join(out, "val_000000.bin"), "a") as f:
            f.write("!")
        with self.assertRaisesRegex(gap.Failure, "val_000000.bin: differs"):
            gap.check("english", out, sums)
        os.remove(os.path.join(out, "text.txt"))
        with self.assertRaisesRegex(gap.Failure, "text.txt: is missing"):
            gap.check("english", out, sums)


class Manifest(unittest.TestCase):
    def test_the_committed_one(self):
        settings, rows = gap.read_manifest()
        self.assertRegex(settings["snapshot"], r"^\d{8}T\d{6}Z$")
        self.assertRegex(settings["tokenizers"], r"^\d+\.\d+\.\d+$")
        self.assertEqual(len({(r["package"], r["cleaner"], r["files"]) for r in rows}), len(rows))
        pins = {}
        for r in rows:                                   # a package of two rows is one file
            self.assertEqual(pins.setdefault(r["package"], (r["version"], r["sha256"], r["size"])), (r["version"], r["sha256"], r["size"]))
        self.assertEqual({r["corpus"] for r in rows}, {"english", "code"})
        self.assertEqual([r["package"] for r in rows if r["corpus"] == "code"], ["linux-source-6.1"])

    def test_committed_checksums_are_of_whole_corpora(self):
        names = gap.read_checksums(gap.CHECKSUMS)
        for corpus in {n.split("/")[0] for n in names} | {"gap-english"}:
            of = {n.split("/")[1] for n in names if n.startswith(corpus + "/")}
            self.assertLessEqual({"text.txt", "tokenizer.bin", "tokenizer.json", "train_000000.bin", "val_000000.bin"}, of, corpus)
        for digest in names.values():
            self.assertRegex(digest, "^[0-9a-f]{64}$")

    def test_a_bad_line_is_named(self):
        good = ["english", "a-doc", "1.0-1", "all", "10", "0" * 64, "html", r"\.html$"]
        with tempfile.TemporaryDirectory() as tmp:
            path = os.path.join(tmp, "m.tsv")
            def read(fields):
                with open(path, "w", encoding="utf-8") as f:
                    f.write("# snapshot: 20260101T000000Z\n" + "\t".join(fields) + "\n")
                return gap.read_manifest(path)
            self.assertEqual(read(good), ({"snapshot": "20260101T000000Z"}, [dict(zip(gap.COLUMNS, good))]))
            for column, bad in enumerate(["french", "A", "1 2", "riscv", "x", "0" * 63, "pdf", "("]):
                with self.assertRaisesRegex(gap.Failure, f"line 2: (bad )?{gap.COLUMNS[column]}"):
                    read(good[:column] + [bad] + good[column + 1:])
            with self.assertRaisesRegex(gap.Failure, "line 2: bad the number of columns"):
                read(good[:-1])


FAKE = """#!/usr/bin/env python3
import json, os, signal, sys, time
o = dict(zip(sys.argv[1::2], sys.argv[2::2])); out = o["--out"]
os.makedirs(out, exist_ok=True); open(os.path.join(os.path.dirname(__file__), "calls"), "a").write(out + "\\n")
log = [{"run": {"options": {"recipe": o["--recipe"], "seed": int(o["--seed"]), "steps": 4}}}, {"eval": 2, "tokens": 2, "val_loss": 3.5},
    {"step": 2, "tokens": 2, "loss": 3.5, "timing": {"tokens_per_s": 1.0}}]
def write(): open(out + "/log.jsonl", "w").write("".join(json.dumps(l) + "\\n" for l in log))
def stop(*_): time.sleep(0.3); open(out + "/saved", "w"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); write()
while o.get("--on-nan") == "skip" and not os.path.exists(out + "/saved"): time.sleep(0.02)
log.append({"eval": 4, "tokens": 4, "val_loss": 3.0}); write()
"""


class Script(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="gap")
        self.addCleanup(shutil.rmtree, self.tmp)

    def dry(self, *arguments):
        r = subprocess.run([SCRIPT, "--dry-run", *arguments], capture_output=True, text=True)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        lines = [shlex.split(l) for l in r.stdout.splitlines()]
        return [dict(zip(l[1::2], l[2::2], strict=True)) for l in lines]

    def test_dry_run(self):
        runs = self.dry()
        every = "bf16 fp8 quartet2 quartet2-no46 quartet2-fwd quartet2-bwd quartet2-search quartet2-search-true nvidia nvidia-46 tetrajet2 quartet fp4-dge-occ".split()
        again = ["bf16", "quartet2", "quartet2-search", "nvidia"]
        self.assertEqual([(r["--seed"], r["--recipe"]) for r in runs], [("1", n) for n in every] + [(s, n) for s in "23" for n in again])
        same = {"--model": "30M", "--seq": "512", "--batch": "128", "--total-batch": "262144", "--tokens": "250M", "--lr": "1.2e-3", "--warmup": "0.1",
                "--schedule": "cosine", "--min-lr": "0.1", "--train-data": "data/gap-english/train_*.bin", "--val-data": "data/gap-english/val_*.bin",
                "--eval-every": "200", "--eval-tokens": "4Mi", "--log-every": "50", "--resume": "auto"}
        for r in runs:
            own = {"--recipe": r["--recipe"], "--seed": r["--seed"], "--out": f"runs/gap/english-250M/seed{r['--seed']}/{r['--recipe']}"}
            self.assertEqual(r, {**same, **own})

    def test_options(self):
        runs = self.dry("--corpus", "code", "--tokens", "750M", "--recipes", "bf16,quartet2", "--repeats", "none", "--quant-stats", "9", "--data", "d", "--out", "o")
        self.assertEqual([(r["--recipe"], r["--tokens"], r["--train-data"], r["--out"], r["--quant-stats"]) for r in runs],
                         [(n, "750M", "d/train_*.bin", f"o/seed1/{n}", "9") for n in ("bf16", "quartet2")])
        self.assertEqual(len(self.dry("--recipes", "bf16", "--seeds", "1,2", "--repeats", "bf16")), 3)       # seed 2 is not run twice
        for bad in (["--corpus", "german"], ["--model", "50M"], ["--seeds"], ["--minutes", "x"]):
            r = subprocess.run([SCRIPT, "--dry-run", *bad], capture_output=True, text=True)
            self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 1), bad)
        r = subprocess.run([SCRIPT, "--data", os.path.join(self.tmp, "none")], capture_output=True, text=True)
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1))
        self.assertIn("build the corpus with: python3 data/gap.py english", r.stderr)

    def run_script(self, out, *extra):
        for name in ("train_000000.bin", "val_000000.bin"):
            open(os.path.join(self.tmp, name), "w").close()
        with open(os.path.join(self.tmp, "meta.json"), "w") as f:
            json.dump({"val_unigram_entropy": 7.0}, f)
        fake = os.path.join(self.tmp, "fake")
        with open(fake, "w") as f:
            f.write(FAKE)
        os.chmod(fake, 0o755)
        r = subprocess.run([SCRIPT, "--data", self.tmp, "--program", fake, "--out", os.path.join(self.tmp, out), "--logs", os.path.join(self.tmp, "logs"),
                            "--recipes", "bf16", "--repeats", "none", *extra], capture_output=True, text=True, timeout=60)
        with open(os.path.join(self.tmp, "calls")) as f:
            return r, len(f.read().splitlines())

    def test_sittings(self):
        """Cut off by the clock, the trainer has saved before the script ends; the next sitting goes on; a third, on a machine with the logs alone, repeats nothing."""
        r, calls = self.run_script("a", "--minutes", "0.02", "--on-nan", "skip")
        self.assertEqual((r.returncode, calls), (0, 1), r.stderr)
        self.assertIn("the sitting is over", r.stdout)
        self.assertTrue(os.path.exists(os.path.join(self.tmp, "a/seed1/bf16/saved")))
        self.assertFalse(os.path.exists(os.path.join(self.tmp, "logs/seed1/bf16/log.jsonl.gz")))
        r, calls = self.run_script("a", "--on-nan", "skip")
        self.assertEqual((r.returncode, calls), (0, 2), r.stderr)
        with gzip.open(os.path.join(self.tmp, "logs/seed1/bf16/log.jsonl.gz"), "rt") as f:
            self.assertEqual(json.loads(f.read().splitlines()[-1])["eval"], 4)
        r, calls = self.run_script("b", "--on-nan", "skip")
        self.assertEqual((r.returncode, calls), (0, 2), r.stderr)
        self.assertIn("finished before", r.stdout)
        self.assertTrue(os.path.exists(os.path.join(self.tmp, "b/summary.csv")))
        r, calls = self.run_script("b", "--on-nan", "stop")                # the options are not those of the log
        self.assertEqual((r.returncode, calls), (1, 2))
        self.assertIn("holds a run with other options", r.stderr)

    def test_header_is_what_cost_says(self):
        with open(SCRIPT, encoding="utf-8") as f:
            text = f.read()
        said = cost.cost("30M", 250e6)[0]
        for figure in (r"[\d.]+ M parameters", r"[\d.]+ GFLOP a token: [\d.e+]+ FLOPs"):
            self.assertIn(re.search(figure, said)[0], text)


if __name__ == "__main__":
    unittest.main()
