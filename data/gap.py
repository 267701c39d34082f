#!/usr/bin/env python3
"""The corpora of scripts/run_30M_gap.sh, from Debian packages pinned by version and SHA-256, byte for byte the same anywhere.

    data/gap.py english                natural English: documentation, RFCs and dictionaries, into data/gap-english
    data/gap.py code                   C: the Linux kernel, into data/gap-code
    data/gap.py english --check        compares what is there with data/gap_checksums.txt; builds nothing

Needs Python's package tokenizers, in the version that data/gap_manifest.tsv states, and apt-get, or the packages themselves in the folder --debs.
"""

import argparse
import concurrent.futures
import gzip
import hashlib
import io
import lzma
import os
import re
import subprocess
import sys
import tarfile
import time
import zlib

import clean
import prepare
from corpus import Failure, Progress, import_package, one_line, warn

HERE = os.path.dirname(os.path.abspath(__file__))
MANIFEST = os.path.join(HERE, "gap_manifest.tsv")
CHECKSUMS = os.path.join(HERE, "gap_checksums.txt")
COLUMNS = ["corpus", "package", "version", "arch", "size", "sha256", "cleaner", "files"]
CORPORA = ("english", "code")
# Between documents; no cleaner lets it through.
SEPARATOR = "\x1e"
VOCABULARY, VAL_TOKENS, VAL_SHARE = 32000, 4_200_000, {"english": 0.06, "code": 0.06}
LEAST_REPEAT = {"english": clean.MIN_REPEAT, "code": 120}    # letters; code repeats short chunks by nature


def read_manifest(path=MANIFEST):
    """-> (settings from '# name: value' lines, [row as a dict])"""
    settings, rows = {}, []
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except OSError as e:
        raise Failure(f"{path}: {e.strerror}: it belongs to the repository, check it out again") from None
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            name, colon, value = line[1:].partition(":")
            if colon and re.fullmatch(r" [a-z]+", name):
                settings[name.strip()] = value.strip()
            continue
        if not line:
            continue
        row = dict(zip(COLUMNS, line.split("\t")))
        wrong = ("the number of columns" if line.count("\t") != len(COLUMNS) - 1 else
                 "corpus" if row["corpus"] not in CORPORA else
                 "package" if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", row["package"]) else
                 "version" if not re.fullmatch(r"[0-9A-Za-z.+~:-]+", row["version"]) else
                 "arch" if row["arch"] not in ("all", "amd64") else
                 "size" if not row["size"].isdigit() else
                 "sha256" if not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]) else
                 "cleaner" if row["cleaner"] not in clean.CLEANERS else None)
        if wrong:
            raise Failure(f"{path}: line {number}: bad {wrong}: a line holds {', '.join(COLUMNS)} between tabs")
        try:
            re.compile(row["files"].rpartition("::")[2])
        except re.error as e:
            raise Failure(f"{path}: line {number}: files is no regular expression: {e}") from None
        rows.append(row)
    return settings, rows


# ----------------------------------------------------------------------------------------------------------------------
# Packages

def deb_name(row):
    """The name apt-get download gives: the colon of an epoch is escaped."""
    return f"{row['package']}_{row['version'].replace(':', '%3a')}_{row['arch']}.deb"


def sha256_file(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def missing_debs(rows, folder):
    """Rows whose package is not in the folder. A file that is there with another content is an error, not a reason to fetch again and again."""
    missing, seen = [], set()
    for row in rows:
        name = deb_name(row)
        if name in seen:
            continue
        seen.add(name)
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            missing.append(row)
        elif (found := sha256_file(path)) != row["sha256"]:
            raise Failure(f"{path}: SHA-256 {found[:16]}..., the manifest says {row['sha256'][:16]}...: remove the file and run again")
    return missing


def apt_sources(snapshot):
    """The release's own archive, where old releases go, and snapshot.debian.org, which keeps every version. Unsigned is well: the manifest pins the SHA-256."""
    for host in ("http://deb.debian.org/debian", "http://archive.debian.org/debian", f"http://snapshot.debian.org/archive/debian/{snapshot}"):
        yield f"deb [trusted=yes check-valid-until=no] {host} bookworm main non-free\n"


def fetch(rows, folder, snapshot):
    """Downloads what the folder lacks by apt-get, with settings of its own: no root, and the machine's package lists stay as they are."""
    os.makedirs(folder, exist_ok=True)
    missing = missing_debs(rows, folder)
    if not missing:
        return
    print(f"fetching {len(missing)} packages, {sum(int(r['size']) for r in missing) / 1e6:.0f} MB, into {folder}", flush=True)
    state, why = os.path.join(os.path.abspath(folder), ".apt"), ""
    for sources in apt_sources(snapshot):
        for sub in ("lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(state, sub), exist_ok=True)
        with open(os.path.join(state, "sources.list"), "w", encoding="utf-8") as f:
            f.write(sources)
        open(os.path.join(state, "status"), "w").close()
        with open(os.path.join(state, "apt.conf"), "w", encoding="utf-8") as f:
            f.write(f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::Cache "{state}/cache";\nDir::Etc::sourcelist "{state}/sources.list";\n'
                    'Dir::Etc::sourceparts "/dev/null";\nAcquire::Languages "none";\nAPT::Architecture "amd64";\nAPT::Sandbox::User "";\n')
        environment = {**os.environ, "APT_CONFIG": os.path.join(state, "apt.conf"), "LC_ALL": "C"}
        try:
            subprocess.run(["apt-get", "-q", "update"], env=environment, capture_output=True)
            for row in missing:                          # one by one: a version that has gone must not stop the others
                r = subprocess.run(["apt-get", "-q", "download", f"{row['package']}={row['version']}"], cwd=folder, env=environment,
                                   capture_output=True, text=True)
                why = r.stderr if r.returncode else why
        except FileNotFoundError:
            raise Failure(f"apt-get is missing: run this on Debian or Ubuntu, or put the packages of {MANIFEST} into {folder} by hand") from None
        missing = missing_debs(rows, folder)
        if not missing:
            return
    raise Failure(f"{deb_name(missing[0])} and {len(missing) - 1} more could not be fetched ({one_line(why)}): check the network and run again, "
                  f"or put them into {folder} by hand")


def deb_tar(path):
    """The data.tar of a .deb, an ar archive, as a tarfile."""
    with open(path, "rb") as f:
        data = f.read()
    if data[:8] != b"!<arch>\n":
        raise Failure(f"{path}: is not a Debian package: remove it and run again")
    at = 8
    while at + 60 <= len(data):
        name, size = data[at:at + 16].rstrip(b" /"), int(data[at + 48:at + 58])
        if name.startswith(b"data.tar"):
            body = data[at + 60:at + 60 + size]
            if name not in (b"data.tar.xz", b"data.tar.gz", b"data.tar"):
                raise Failure(f"{path}: holds {name.decode()}, which Python's tarfile cannot read: pin another version of the package")
            return tarfile.open(fileobj=io.BytesIO(body))
        at += 60 + size + size % 2
    raise Failure(f"{path}: has no data.tar: remove it and run again")


def package_texts(path, files):
    """Yields (name, text) of a package's files that match the regular expression, in the order of their names. 'OUTER::REGEX': of the tar within it."""
    outer, _, pattern = files.rpartition("::")
    archive = deb_tar(path)
    if outer:
        archive = tarfile.open(fileobj=archive.extractfile("./" + outer))
    pattern, found = re.compile(pattern), []
    for member in archive:
        name = member.name.removeprefix("./")
        if member.isfile() and pattern.search(name):
            data = archive.extractfile(member).read()
            if name.endswith((".gz", ".dz")):
                data = gzip.decompress(data)
            found.append((name, data))
    if not found:
        raise Failure(f"{path}: no file matches {files!r}: mend its line in {MANIFEST}")
    for name, data in sorted(found):
        yield name, data.decode("utf-8", "windows-1252")


def clean_package(job):
    """-> [document as its paragraphs]"""
    path, cleaner, files = job
    try:
        return [d for _, text in package_texts(path, files) for d in clean.CLEANERS[cleaner](text) if d]
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as e:
        raise Failure(f"{path}: cannot be unpacked ({one_line(e)}): remove it and run again") from None


# ----------------------------------------------------------------------------------------------------------------------
# Packages -> text

def gather(rows, folder, workers, report):
    """-> the cleaned documents of all rows, each once. report(row, documents, bytes) as they come."""
    repeats = {corpus: clean.Deduplicator(least) for corpus, least in LEAST_REPEAT.items()}
    jobs = [(os.path.join(folder, deb_name(r)), r["cleaner"], r["files"]) for r in rows]
    progress, done, documents = Progress("cleaning", sum(int(r["size"]) for r in rows)), 0, []
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        for row, cleaned in zip(rows, pool.map(clean_package, jobs)):
            least, english = (clean.MIN_ENTRY, False) if row["cleaner"] == "dict" else (clean.MIN_DOCUMENT, row["cleaner"] != "code")
            kept = [d for p in cleaned if (d := repeats[row["corpus"]].document(p, least, english))]
            documents += kept
            done += int(row["size"])
            report(row, len(kept), sum(map(len, kept)))
            progress.update(done, row["package"])
    progress.close()
    return documents, repeats


def write_text(path, documents):
    """In the order of a hash, so that the first --val-tokens of validation are drawn from the whole corpus, not from its first packages."""
    documents.sort(key=lambda d: hashlib.blake2b(d, digest_size=16, salt=b"gap order").digest())
    with open(path + ".partial", "wb") as f:
        f.write(SEPARATOR.encode().join(documents))
    os.replace(path + ".partial", path)


def outputs(out):
    return sorted(n for n in os.listdir(out) if re.fullmatch(r"(train|val)_[0-9]{6}\.bin|tokenizer\.(bin|json)|text\.txt", n))


def read_checksums(path):
    """sha256sum's format -> {name: digest}"""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return {line[66:].rstrip("\n"): line[:64] for line in f if not line.startswith("#")}


def check(corpus, out, path=CHECKSUMS):
    """Compares an output folder with the committed checksums."""
    wanted = {os.path.basename(n): d for n, d in read_checksums(path).items() if os.path.dirname(n) == f"gap-{corpus}"}
    if not wanted:
        raise Failure(f"{path}: holds nothing of gap-{corpus}: there is nothing to compare with")
    for name, digest in wanted.items():
        file = os.path.join(out, name)
        if not os.path.isfile(file):
            raise Failure(f"{file}: is missing: build it with data/gap.py {corpus}")
        if sha256_file(file) != digest:
            hint = "the cleaned text already differs: is data/clean.py changed?" if name == "text.txt" else "another version of the package tokenizers?"
            raise Failure(f"{file}: differs from {os.path.basename(path)}: {hint}")
    extra = [n for n in outputs(out) if n not in wanted]
    if extra:
        raise Failure(f"{out}/{extra[0]}: is not in {os.path.basename(path)}: remove the folder and build it again")
    print(f"{out}: {len(wanted)} files, as in {os.path.basename(path)}")


def record(corpus, out, path=CHECKSUMS):
    sums = {n: d for n, d in read_checksums(path).items() if os.path.dirname(n) != f"gap-{corpus}"}
    sums.update({f"gap-{corpus}/{n}": sha256_file(os.path.join(out, n)) for n in outputs(out)})
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(f"{sums[n]}  {n}\n" for n in sorted(sums))


def build(args, settings, rows, out):
    tokenizers, wanted = import_package("tokenizers"), settings.get("tokenizers")
    if tokenizers.__version__ != wanted:
        warn(f"tokenizers {tokenizers.__version__}: the checksums are of {wanted} (python3 -m pip install tokenizers=={wanted})")
    start = time.monotonic()
    fetch(rows, args.debs, settings.get("snapshot"))
    fetched = time.monotonic()
    os.makedirs(out, exist_ok=True)
    lines = []
    documents, repeats = gather(rows, args.debs, args.workers, lambda row, n, size: lines.append((row["package"], row["cleaner"], n, size)))
    for package, cleaner, n, size in lines:
        print(f"  {package:<28} {cleaner:<5} {n:>7,} documents {size:>12,} bytes")
    for corpus, r in repeats.items():
        if r.documents:
            print(f"{corpus}: {r.documents:,} documents; left out: {r.repeated:,} repeated paragraphs ({r.repeated_bytes / 1e6:.1f} MB), "
                  f"{r.short:,} documents too short, {r.foreign:,} not English")
    text = os.path.join(out, "text.txt")
    write_text(text, documents)
    size, cleaned = sum(map(len, documents)), time.monotonic()
    del documents
    print(f"{text}: {size:,} bytes of text; fetched in {fetched - start:.0f} s, cleaned in {cleaned - fetched:.0f} s", flush=True)
    # The name of the text goes into meta.json: relative, so that it is the same on any machine.
    options = prepare.parse_arguments(["--text", os.path.relpath(text), "--separator", SEPARATOR, "--train-bpe", str(VOCABULARY), "--val-tokens", str(VAL_TOKENS),
                                       "--val-share", str(VAL_SHARE[args.corpus]), "--workers", str(args.workers), "--out", out])
    prepare.prepare(options)
    if args.record:
        record(args.corpus, out)
    check(args.corpus, out)


def main():
    p = prepare.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("corpus", choices=CORPORA)
    p.add_argument("--out", metavar="DIR", help="output folder (default: data/gap-CORPUS)")
    p.add_argument("--debs", metavar="DIR", default=os.path.join(HERE, "gap-debs"), help="the packages, fetched or put there by hand (default: data/gap-debs)")
    p.add_argument("--workers", type=prepare.count(1, 1024), default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: one a core)")
    p.add_argument("--check", action="store_true", help="compare the output folder with the checksums, build nothing")
    p.add_argument("--record", action="store_true", help="write the checksums of what was built, after a change of the recipe")
    args = p.parse_args()
    out = args.out or os.path.join(HERE, f"gap-{args.corpus}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        if args.check:
            check(args.corpus, out)
        else:
            settings, rows = read_manifest()
            build(args, settings, [r for r in rows if r["corpus"] == args.corpus], out)
    except Failure as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or out}: {e.strerror or one_line(e)}: check the path, its permissions and the free space", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted: run it again, packages already fetched are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
