"""A cache in an object store, without locks: committed objects are created once and never changed.

    <location>/fragments/<name>, packs/, splits/ ...   files
    <location>/generations/<digest>/<nonce>/<file>     files of one commit of a folder, written before the commit
                                   /commits/0000.json  commits of the folder: the names of its files, with checksums
    <location>/runs/<run>/0000.json, skips/...         versions of a record

commits  numbered versions, each an object that only one process can create; the content of a folder's commit
copies   this node's copies of folders, and the removal of unused copies
folders  reading, committing and removing folders
node     this node's folder, and its locks
remembered  the store's last responses, for times when it does not respond
store    `ObjectCacheStore`; the check that the store lets only one of several processes create an object
"""
