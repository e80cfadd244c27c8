#!/bin/sh
# Downloads the packages that tests need and that the GPU machine's image lacks, as wheels that can be carried there.
#
# Run it in the repository's root, with a network. The wheels land in .whl, which git is told to ignore; there,
# `python3 -m pip install --no-index --no-deps --target DIR .whl/*.whl` installs them. All are for CPython 3.12 on
# x86-64 Linux. The notebook test of tests/gpu needs a notebook client, a kernel, and what those two need beyond the
# image; torch's own tests (tools/torch_tests.py) need expecttest.
set -eu

packages="
  nbclient==0.11.0 nbformat==5.11.1 jupyter_client==8.10.0 jupyter_core==5.9.1 ipykernel==7.4.0 ipython==9.18.1
  comm==0.2.3 debugpy==1.8.22 nest-asyncio2==1.7.4 pyzmq==27.3.0 tornado==6.6.1 traitlets==5.16.1 platformdirs==4.14.8
  fastjsonschema==2.22.3 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1
  ipython_pygments_lexers==1.1.1 matplotlib-inline==0.2.2 prompt_toolkit==3.0.53 wcwidth==0.9.4 jedi==0.20.1
  parso==0.8.7 pexpect==4.9.0 ptyprocess==0.7.0 stack-data==0.6.3 asttokens==3.0.2 executing==2.3.0 pure_eval==0.2.4
  expecttest==0.3.0
"

# pip matches each platform tag exactly, so the older ones are named too.
platforms=""
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
  platforms="$platforms --platform ${tag}_x86_64"
done

exclude="$(git rev-parse --git-common-dir)/info/exclude"
mkdir -p "$(dirname "$exclude")"
grep -qxF '/.whl/' "$exclude" 2>/dev/null || echo '/.whl/' >> "$exclude"

# Two versions of one package would stop the whole install there.
rm -rf .whl
# shellcheck disable=SC2086  # Both lists are meant to be split into words.
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
  --dest .whl $packages
echo "$(find .whl -name '*.whl' -type f | wc -l) wheels, $(du -sm .whl | cut -f1) MiB in .whl"
