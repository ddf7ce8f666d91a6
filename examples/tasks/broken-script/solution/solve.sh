#!/bin/bash
set -euo pipefail
cat > /app/collect.sh <<'EOF'
#!/bin/bash
# Usage: collect.sh SOURCE TARGET
set -euo pipefail
source=$1
target=$2
count=0
cd -- "$source"
while IFS= read -r -d '' file; do
    mkdir -p -- "$target/$(dirname -- "$file")"
    cp -- "$file" "$target/$file"
    count=$((count + 1))
done < <(find . -type f -name '*.txt' -print0)
echo "$count"
EOF
