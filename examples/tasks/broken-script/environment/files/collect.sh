#!/bin/bash
# Usage: collect.sh SOURCE TARGET
source=$1
target=$2
count=0
cd $source
find . -name *.txt | while read file; do
    mkdir -p $target/$(dirname $file)
    cp $file $target/$file
    count=$((count + 1))
done
echo $count
